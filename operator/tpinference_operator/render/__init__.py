"""Pure builders of manifests, one file a child kind."""
