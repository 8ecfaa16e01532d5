# SPDX-License-Identifier: Apache-2.0
"""Models and training states on disk.

Start at `pretrained`, which loads and saves a model in any format. `states` holds the training states of a run,
`names` the one table of parameter names, `hf` and `tf1` the formats of Hugging Face and Google. The loaders of these
return `names.Imported`; the savers write a directory that must not exist, and return lines for the user.
"""
