# SPDX-License-Identifier: Apache-2.0
"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Input, configuration or files that cannot be used.

    The message is one line with the value, the rule it breaks and the fix. Command-line tools print it
    without a traceback and exit with status 1; nothing has been lost or overwritten when it is raised.
    """
