//! Tables that benchmark clients print: a label with its unit, a colon, a number.

use serde_json::Value;

use super::facts::{self, Fact, Metric, Statistic};
use super::{Loss, ResultKind, ServingResults, ServingRun};

/// Longest line that is looked at.
const LINE_LIMIT: usize = 4096;

/// `None` where the text holds no such table.
pub(super) fn read(text: &str) -> Option<ServingResults> {
    let mut lines: Vec<(usize, String)> = (1..).zip(text.lines().map(plain)).collect();
    // A last line without its end may hold half a number.
    let torn = match lines.last() {
        Some((_, last)) if !text.ends_with('\n') && parts(last).is_some() => lines.pop(),
        _ => None,
    };
    let mut results = whole_lines(&lines)?;
    if let Some((line, _)) = torn {
        results.complete = false;
        results.problems.push(Loss {
            line,
            what: "the line does not end: its figure may be cut off and is left out".to_owned(),
        });
    }
    Some(results)
}

fn whole_lines(lines: &[(usize, String)]) -> Option<ServingResults> {
    if lines
        .iter()
        .any(|(_, line)| line.contains("MLPerf Results Summary"))
    {
        return mlperf(lines);
    }
    let start = lines.iter().position(|(_, line)| is_heading(line))?;
    Some(serving(&lines[start..]))
}

/// Without colour codes and spaces at either end.
fn plain(line: &str) -> String {
    let mut plain = String::new();
    let mut letters = line.chars().take(LINE_LIMIT);
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' {
            // An escape sequence ends with its first letter.
            letters.by_ref().find(|inner| inner.is_ascii_alphabetic());
        } else {
            plain.push(letter);
        }
    }
    plain.trim().to_owned()
}

fn is_heading(line: &str) -> bool {
    line.contains("Serving Benchmark Result") || line.contains("PERFORMANCE OVERVIEW")
}

/// The label in lower case without its unit, the unit, and what stands after the colon.
fn parts(line: &str) -> Option<(String, String, &str)> {
    let (label, value) = line.rsplit_once(':')?;
    let label = label.trim();
    let (name, unit) = match label.strip_suffix(')').and_then(|rest| rest.rsplit_once('(')) {
        Some((name, unit)) if !name.is_empty() => (name, unit),
        _ => (label, ""),
    };
    Some((
        name.trim().to_lowercase(),
        unit.trim().to_lowercase(),
        value.trim(),
    ))
}

/// Everything from the heading on.
fn serving(lines: &[(usize, String)]) -> ServingResults {
    let mut run = ServingRun::default();
    let mut problems = Vec::new();
    let mut closed = false;
    for (line, text) in &lines[1..] {
        if text.len() > 20 && text.chars().all(|letter| letter == '=') {
            closed = true;
            break;
        }
        let Some((label, unit, value)) = parts(text) else {
            continue;
        };
        let known = facts::of_label(&label);
        let number = value.parse::<f64>().ok();
        match (known, number) {
            (Some(fact), Some(number))
                if facts::put(&mut run.report, fact, number * facts::seconds_in(&unit)) => {}
            (None, _) if label == "backend" => run.backend = Some(value.to_owned()),
            (None, Some(number)) => {
                let label = if unit.is_empty() {
                    label
                } else {
                    format!("{label} ({unit})")
                };
                run.other.insert(label, Value::from(number));
            }
            (None, None) if !value.is_empty() => {
                run.other.insert(label, Value::from(value));
            }
            _ => problems.push(Loss {
                line: *line,
                what: format!("`{label}` has no number that can be: \"{value}\""),
            }),
        }
    }
    if !closed {
        let line = lines.last().map_or(0, |(line, _)| *line);
        problems.push(Loss {
            line,
            what: "the closing line is missing: the table is cut off".to_owned(),
        });
    }
    ServingResults {
        kind: ResultKind::ServingText,
        runs: vec![run],
        complete: problems.is_empty(),
        problems,
    }
}

/// The summary of MLPerf's load generator, in nanoseconds throughout.
fn mlperf(lines: &[(usize, String)]) -> Option<ServingResults> {
    let mut run = ServingRun::default();
    let mut problems = Vec::new();
    let mut has_parameters = false;
    for (line, text) in lines {
        has_parameters |= text.contains("Test Parameters Used");
        let Some((label, unit, value)) = parts(text) else {
            continue;
        };
        let fact = mlperf_fact(&label);
        match (fact, value.parse::<f64>().ok()) {
            (Some(fact), Some(number)) => {
                if !facts::put(&mut run.report, fact, number * facts::seconds_in(&unit)) {
                    problems.push(Loss {
                        line: *line,
                        what: format!("`{label}` cannot be {value}"),
                    });
                }
            }
            (Some(_), None) => problems.push(Loss {
                line: *line,
                what: format!("`{label}` has no number"),
            }),
            (None, _) => {
                let label = if unit.is_empty() {
                    label
                } else {
                    format!("{label} ({unit})")
                };
                run.other.insert(label, Value::from(value));
            }
        }
    }
    if !has_parameters {
        let line = lines.last().map_or(0, |(line, _)| *line);
        problems.push(Loss {
            line,
            what: "the parameters of the test are missing: the summary is cut off".to_owned(),
        });
    }
    Some(ServingResults {
        kind: ResultKind::MlperfSummary,
        runs: vec![run],
        complete: problems.is_empty(),
        problems,
    })
}

fn mlperf_fact(label: &str) -> Option<Fact> {
    match label {
        "completed samples per second" | "samples per second" => return Some(Fact::RequestRate),
        "completed tokens per second" | "tokens per second" => return Some(Fact::OutputRate),
        _ => {}
    }
    let (statistic, rest) = match label.split_once(" percentile ") {
        Some((percent, rest)) => {
            let statistic = match percent.parse::<f64>().ok()? {
                50.0 => Statistic::P50,
                90.0 => Statistic::P90,
                95.0 => Statistic::P95,
                99.0 => Statistic::P99,
                _ => return None,
            };
            (statistic, rest)
        }
        None => {
            let (word, rest) = label.split_once(' ')?;
            (facts::statistic_of(word)?, rest)
        }
    };
    let metric = match rest {
        "latency" => Metric::E2e,
        "first token latency" => Metric::Ttft,
        "time to output token" => Metric::Tpot,
        _ => return None,
    };
    Some(Fact::Latency(metric, statistic))
}
