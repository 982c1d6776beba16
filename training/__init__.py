"""Training as in section 5 of the paper, on top of transformers' trainers and Accelerate."""
