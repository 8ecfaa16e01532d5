# SPDX-License-Identifier: Apache-2.0
"""Google's training examples: TFRecord files, the examples in them, and their way into a data set of ours."""
