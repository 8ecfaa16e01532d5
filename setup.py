# SPDX-License-Identifier: Apache-2.0
"""The packages of the wheel: bert_jax, and the recipes of configs/ as bert_jax.configs. All else is in setup.cfg.

BERT_JAX_REPOSITORY, the address of the repository, gives the wheel its links; without it, it has none.
"""

import os

from setuptools import find_packages, setup

REPOSITORY = os.environ.get("BERT_JAX_REPOSITORY", "").rstrip("/")

setup(
    packages=[*find_packages(include=["bert_jax", "bert_jax.*"]), "bert_jax.configs"],
    package_dir={"bert_jax.configs": "configs"},
    project_urls={"Source": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md"}
    if REPOSITORY
    else {},
)
