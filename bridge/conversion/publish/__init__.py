"""To the Hugging Face Hub: read `upload`, then `model_card`."""
