#!/usr/bin/env bash
# Llama-3.2-1B on one GPU of 80 GB, from the Hub to the Hub: convert, plan, train, a control, judge, push.
#
#     TEXTS=my-texts/ HELD_OUT=held-out/ REPO=you/llama-3.2-1b-fox bash examples/llama-3.2-1b.sh
#
# Its licence has to be accepted on the Hub (hf auth login). Not run here: docs/retrofit-your-model.md says what to expect.
set -euo pipefail
BASE=meta-llama/Llama-3.2-1B

retrofox convert $BASE converted --dry-run
retrofox recipes cp llama-3.2-1b
retrofox plan llama-3.2-1b.yaml "data.train=[$TEXTS]" "data.eval=[$HELD_OUT]" output=runs/mine
retrofox train llama-3.2-1b.yaml "data.train=[$TEXTS]" "data.eval=[$HELD_OUT]" output=runs/mine
retrofox train llama-3.2-1b.yaml "fox={rope: interpolate, rope_factor: 8, gate: none}" stages.0.budget=null "data.train=[$TEXTS]" "data.eval=[$HELD_OUT]" output=runs/control
retrofox report runs/mine/model --against $BASE runs/control/model --data "$HELD_OUT"
retrofox panel runs/mine/model --against $BASE --out runs/mine/panel
retrofox push runs/mine/model "$REPO" --private
