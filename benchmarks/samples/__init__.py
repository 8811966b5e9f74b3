"""Texts and questions that benchmarks ask: the packaged samples, or the files of a data folder (`--data`).

`stories.txt` and `questions.json` were written for this project and come from no data set. They suffice to
time systems and to see that answers agree; accuracies on so few questions have wide intervals.
"""
