# SPDX-License-Identifier: Apache-2.0
"""Files and URLs: reading with any compression, atomic writing, locks and checks.

`files` reads, `writing` writes, `urls` handles gs:// and s3://, and `schema` checks JSON.
"""
