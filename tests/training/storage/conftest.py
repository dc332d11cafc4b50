from written_output import output  # noqa: F401
