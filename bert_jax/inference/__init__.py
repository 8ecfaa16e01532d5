# SPDX-License-Identifier: Apache-2.0
"""What a trained model is used for: predictions, features, scores of sentences, and export."""
