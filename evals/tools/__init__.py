"""Tool calls: does a model call functions when its source does, and are the calls what the functions' schemas ask for.

In the manner of Moonshot's K2 vendor verifier. `requests` reads what is asked, `server` and `local` ask it, `answers`
keeps what came, `check` tells a good call from a bad one, `judge` makes the numbers; the formats that families write
their calls in are in `parse`.

The record's object "tool_calls", as `judge.judge` makes it (an Interval is {"mean", "low", "high", "error"}, 95 %; all
are shares from 0 to 1; null where there is no baseline, or nothing to take a mean of):

  requests, repeats   of the file, and the most samples of one of them; clusters: requests that differ
  trigger_rate        Interval: answers that call tools; also baseline_trigger_rate
  schema_accuracy     Interval: of those, answers whose calls are all valid; also baseline_schema_accuracy
  precision, recall   Intervals: of the target's triggers against the baseline's, request by request
  f1                  Interval: of the same
  floor               Interval: f1 of the baseline's samples among each other (with repeats)
  triggers            "compared", "left_out" (requests that one side has no answer to), "true_positives",
                      "false_positives", "false_negatives", "true_negatives", and "comparison": `compare.Comparison` of
                      the trigger rates, with the flips and McNemar's p
  schema              "both_triggered", and "comparison" of the schema accuracies over those requests
  target, baseline    of each: "answers"; "unanswered" and the first "errors"; how often each of the "finish_reasons"
                      came; "triggered" and "valid" answers; "calls_unfinished", answers that hold calls but do not say
                      that they ended for them; "failures": kind -> {"count", "first": [{"line", "name", "why"}]}
  scores              what all intervals are made of (`judge.rejudge`): "questions" (ids), "clusters", and for "target"
                      and "baseline" {"triggered", "valid"}: of each request a list, 0, 1 or null for each sample
"""
