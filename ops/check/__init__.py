"""Is this engine one that kvatlas understands, and is this deployment wired (`kvatlas check-engine`, `doctor`)?"""
