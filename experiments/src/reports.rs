//! Reports for people, and the table of requests.

use std::str::FromStr;

use infercluster_spec::report::{RequestSummary, Slo};
use infercluster_spec::{Report, SimDuration, SimTime};

use crate::Outcome;
use crate::screen::{Columns, Screen, facts};

/// Latency limits as the command line writes them: `ttft=2s,itl=100ms`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SloFlag(pub(crate) Slo);

impl FromStr for SloFlag {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut slo = Slo::default();
        for part in text.split(',') {
            let (name, limit) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` is no limit, write ttft=2s,itl=100ms"))?;
            let field = match name.trim() {
                "ttft" => &mut slo.ttft,
                "itl" => &mut slo.itl,
                "tpot" => &mut slo.tpot,
                "e2e" => &mut slo.e2e,
                other => {
                    return Err(format!(
                        "`{other}` is no limit, known are ttft, itl, tpot and e2e"
                    ));
                }
            };
            let limit: SimDuration = limit.parse().map_err(|error| format!("{name}: {error}"))?;
            if field.replace(limit).is_some() {
                return Err(format!("{name} is limited twice"));
            }
        }
        Ok(Self(slo))
    }
}

/// A report as tables.
pub(crate) fn people(report: &Report) -> String {
    let mut lines = vec![
        (
            "requests",
            format!(
                "{} completed, {} failed, {} skipped, {} preemptions",
                report.completed, report.failed, report.skipped, report.preemptions
            ),
        ),
        ("duration", format!("{:.3} s", report.duration_s)),
        ("throughput", format!("{:.3} requests/s", report.requests_per_s)),
        (
            "tokens",
            format!(
                "{:.1} output/s, {:.1} prompt and output/s",
                report.output_tokens_per_s, report.total_tokens_per_s
            ),
        ),
    ];
    if let (Some(goodput), Some(attainment)) = (report.goodput_per_s, report.slo_attainment) {
        let text = format!(
            "{goodput:.3} requests/s, {:.1} % met every limit",
            100.0 * attainment
        );
        lines.push(("goodput", text));
    }
    if let Some(busy) = &report.busy_fraction {
        let each: Vec<String> = busy
            .per_gpu
            .iter()
            .map(|(gpu, share)| format!("{gpu} {:.1} %", 100.0 * share))
            .collect();
        let text = format!(
            "{:.1} % by capability ({})",
            100.0 * busy.weighted,
            each.join(", ")
        );
        lines.push(("busy fraction", text));
    }
    let mut table = Columns::new(["ms", ">mean", ">p50", ">p90", ">p99", ">max"]);
    let metrics = [
        ("ttft", report.ttft_s),
        ("itl", report.itl_s),
        ("tpot", report.tpot_s),
        ("e2e", report.e2e_s),
    ];
    for (name, summary) in metrics {
        let ms = |seconds: f64| format!("{:.2}", 1000.0 * seconds);
        let [mean, p50, p90, p99, max] =
            [summary.mean, summary.p50, summary.p90, summary.p99, summary.max].map(ms);
        table.row([name.to_owned(), mean, p50, p90, p99, max]);
    }
    format!("{}\n{table}", facts(lines))
}

/// Says what did not run; a run that completed nothing met no goal.
pub(crate) fn judge(report: &Report, screen: &Screen) -> Outcome {
    if report.skipped > 0 {
        let skipped = report.skipped;
        screen.say(format!(
            "note: {skipped} requests can never fit the layout's KV memory or context"
        ));
    }
    if report.completed == 0 && report.skipped + report.failed > 0 {
        return Outcome::GoalNotMet;
    }
    Outcome::Done
}

/// One row a request, as CSV; times in seconds, empty where there is none.
pub(crate) fn requests_csv(requests: impl Iterator<Item = RequestSummary>) -> anyhow::Result<Vec<u8>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "request",
        "arrival_s",
        "input_tokens",
        "output_tokens",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "preemptions",
        "completed",
    ])?;
    for request in requests {
        let seconds = |span: SimDuration| (span.as_nanoseconds() as f64 / 1e9).to_string();
        let since_arrival =
            |at: Option<SimTime>| at.map_or_else(String::new, |at| seconds(at.since(request.arrival)));
        writer.write_record([
            request.id.0.to_string(),
            seconds(request.arrival.since(SimTime::ZERO)),
            request.input.0.to_string(),
            request.output.0.to_string(),
            since_arrival(request.first_token),
            request.tpot().map_or_else(String::new, seconds),
            since_arrival(request.last_token),
            request.preemptions.to_string(),
            request.completed.to_string(),
        ])?;
    }
    Ok(writer.into_inner()?)
}

#[cfg(test)]
mod tests {
    use infercluster_spec::report::RequestRecord;
    use infercluster_spec::{RequestId, Tokens};

    use super::*;

    #[test]
    fn limits_are_read_by_name() {
        let SloFlag(slo) = "ttft=2s,itl=100 ms".parse().unwrap();
        assert_eq!(slo.ttft, Some(SimDuration(2_000_000_000_000)));
        assert_eq!(slo.itl, Some(SimDuration(100_000_000_000)));
        for bad in ["ttft=2", "fast=1s", "ttft", "ttft=1s,ttft=2s", ""] {
            assert!(bad.parse::<SloFlag>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_request_is_a_row() {
        let ms = |value: u64| SimTime(value * 1_000_000_000);
        let record = RequestRecord {
            id: RequestId(7),
            arrival: ms(100),
            input: Tokens(5),
            token_times: vec![ms(150), ms(160), ms(190)],
            preemptions: 1,
            completed: true,
        };
        let text = String::from_utf8(requests_csv([record.summary()].into_iter()).unwrap()).unwrap();
        assert_eq!(text.lines().last(), Some("7,0.1,5,3,0.05,0.02,0.09,1,true"));
    }
}
