# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: files of several formats, TensorFlow Datasets, and the documentation of Python.

Start at `corpus`, which reads any of them.
"""
