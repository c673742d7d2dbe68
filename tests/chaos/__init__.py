"""The worker under fire: killed at random moments, told to leave, cut off from its store, fed nonsense."""
