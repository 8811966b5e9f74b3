"""Mixtures of experts: which experts a token visits (`routing`), and what they compute (`mixture`)."""
