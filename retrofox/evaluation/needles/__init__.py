"""Parts of `retrofox needle`: tasks, prompts, word lists, scoring, statistics, report."""
