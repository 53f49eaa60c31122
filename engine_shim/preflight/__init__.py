"""Would an engine be steered?  Answered from its flags, before anything is configured."""
