"""What is made and destroyed next, and which places cannot be had. Pure."""
