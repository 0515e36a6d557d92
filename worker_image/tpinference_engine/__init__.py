"""Turns prompts into tokens on the ranks of one RayCluster; never imports kopf or kubernetes."""
