"""The flat model: all parameters are views of one vector, and server rules are linear algebra on such vectors."""
