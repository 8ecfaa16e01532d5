# SPDX-License-Identifier: Apache-2.0
"""Uses of a trained model: predictions, features, scores of sentences, and export."""
