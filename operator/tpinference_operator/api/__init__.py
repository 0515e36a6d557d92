"""The TPInference API: models, their CRD schema, and the closed list of condition reasons."""
