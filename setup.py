# SPDX-License-Identifier: Apache-2.0
"""The packages of the wheel: bert_jax, and the recipes of configs/ as bert_jax.configs. All else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["bert_jax", "bert_jax.*"]), "bert_jax.configs"],
    package_dir={"bert_jax.configs": "configs"},
)
