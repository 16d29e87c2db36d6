"""What the model remembers of a sequence: one interface, dense for training, paged for service."""
