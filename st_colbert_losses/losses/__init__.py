"""The named losses: an objective, its defaults and its documentation."""
