"""The training job: its configuration, its loop, and the steps the loop is made of."""
