"""What the attention layers of an attached model call, and how it is registered."""
