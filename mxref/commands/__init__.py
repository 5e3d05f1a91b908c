"""What commands of the command line do beyond calling the library once."""
