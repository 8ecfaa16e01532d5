# SPDX-License-Identifier: Apache-2.0
"""Files and URLs: read whatever their compression, written whole or not at all, locked and checked.

Start at `files` to read, at `writing` to write, and at `urls` for what is behind gs:// or s3://. `schema` checks JSON.
"""
