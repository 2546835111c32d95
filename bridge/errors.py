"""The one kind of error a user may see.

A message states the fact, the file or tensor, and the way out, in one line. The command line
prints it and exits with 2; anything else that is raised is a defect of ours and shows a traceback.
"""


class BridgeError(Exception):
    """Something about the input or the machine that the user can mend."""
