"""What commands of the command line do beyond calling the library once."""


class Terminated(SystemExit):
    """A signal asked the program to end: no kernel did, whose SystemExit is a failure like any other."""
