"""Device meshes: which ranks run one pipeline, and which hold replicas of a stage."""
