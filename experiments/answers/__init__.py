"""The chapter's six exercises (section 11.7), one file each: a prediction, a run, an answer."""
