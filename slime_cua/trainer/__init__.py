"""Megatron training: TrainerRank (one rank), LocalTrainerGroup (ranks on one machine), SupervisedTrainer (streams)."""
