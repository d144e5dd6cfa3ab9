//! The Prometheus page: vLLM's names where it has the figure, `infercluster:` names where it has not.

use std::fmt::Write;

use crate::coordinator::{ReplicaStatus, Status};

/// The page in Prometheus' text format.
pub(super) fn page(model: &str, status: &Status) -> String {
    let mut page = Page {
        text: String::new(),
        model: escape(model),
    };
    let replicas = &status.replicas;
    let sum = |count: fn(&ReplicaStatus) -> u64| replicas.iter().map(count).sum::<u64>() as f64;
    page.one(
        "vllm:num_requests_running",
        "gauge",
        "Sequences that hold KV.",
        sum(|r| r.running),
    );
    page.one(
        "vllm:num_requests_waiting",
        "gauge",
        "Sequences that wait.",
        sum(|r| r.waiting),
    );
    let (total, free) = (sum(|r| r.kv_blocks), sum(|r| r.kv_blocks_free));
    let used = if total > 0.0 { 1.0 - free / total } else { 0.0 };
    page.one(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of KV blocks in use, 1 is all.",
        used,
    );
    page.one(
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens of accepted requests.",
        sum(|r| r.prompt_tokens),
    );
    page.one(
        "vllm:generation_tokens_total",
        "counter",
        "Generated tokens.",
        sum(|r| r.generated_tokens),
    );
    page.one(
        "vllm:num_preemptions_total",
        "counter",
        "Sequences that lost their KV.",
        sum(|r| r.preemptions),
    );
    page.head(
        "vllm:request_success_total",
        "counter",
        "Requests that ended, by reason.",
    );
    for (reason, count) in [
        ("length", sum(|r| r.finished_length)),
        ("stop", sum(|r| r.finished_stop)),
        ("abort", sum(|r| r.cancelled)),
    ] {
        page.row(
            "vllm:request_success_total",
            &format!(",finished_reason=\"{reason}\""),
            count,
        );
    }
    page.one(
        "infercluster:requests_failed_total",
        "counter",
        "Requests that failed.",
        sum(|r| r.failed),
    );
    page.one(
        "infercluster:requests_refused_total",
        "counter",
        "Requests refused at the door.",
        status.refused as f64,
    );
    page.head("infercluster:steps_total", "counter", "Completed steps.");
    for replica in replicas {
        let label = format!(",replica=\"{}\"", replica.id.0);
        page.row("infercluster:steps_total", &label, replica.steps as f64);
    }
    page.head(
        "infercluster:step_seconds_total",
        "counter",
        "Seconds of completed steps, from dispatch to tokens.",
    );
    for replica in replicas {
        let label = format!(",replica=\"{}\"", replica.id.0);
        page.row("infercluster:step_seconds_total", &label, replica.step_s);
    }
    page.head("infercluster:worker_up", "gauge", "Whether a worker lives.");
    for worker in &status.workers {
        let label = format!(",gpu=\"{}\"", worker.gpu.0);
        page.row(
            "infercluster:worker_up",
            &label,
            f64::from(u8::from(worker.process.is_some())),
        );
    }
    page.text
}

struct Page {
    text: String,
    model: String,
}

impl Page {
    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.row(name, "", value);
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn row(&mut self, name: &str, more: &str, value: f64) {
        let model = &self.model;
        let _ = writeln!(self.text, "{name}{{model_name=\"{model}\"{more}}} {value}");
    }
}

/// A label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
