//! `plan flow`: which layers each node holds so that the most tokens flow through all of them.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use infercluster_planner::flow::{FlowDocument, FlowPlan, FlowProblem, solve};
use infercluster_spec::Bytes;

use crate::Outcome;
use crate::io;
use crate::screen::{Columns, Screen, facts};

/// Places consecutive layers on nodes so that the most tokens/s flow through them, with a bound.
///
/// A problem names the layers and the kinds of node with what one carries by number of layers held. Links are
/// unlimited where they are not given. Exit code 1 where no placement carries anything.
#[derive(Debug, Args)]
#[command(
    after_help = "A problem, every field of which but the first two may be left out:\n  \
    {\"layers\": 80, \"nodes\": [{\"name\": \"a100\", \"count\": 4, \"region\": 0, \"throughput\": {\"1\": 900.0, \"2\": 500.0}}],\n   \
    \"link_tokens_per_s\": {\"within\": null, \"cross\": 800.0,\n   \
    \"pairs\": [{\"from\": \"a100#0\", \"to\": \"a100#1\", \"tokens_per_s\": 1000.0}]},\n   \
    \"coordinator_tokens_per_s\": null, \"nic_tokens_per_s\": null, \"partial\": false}\n\nExample:\n  \
    infercluster plan flow problem.json --json"
)]
pub(super) struct Flow {
    /// The problem as JSON, or - for standard input.
    problem: PathBuf,
}

/// Largest problem that is read: a pair of links for every two of the most nodes that are accepted.
const PROBLEM_LIMIT: Bytes = Bytes(256 << 20);

/// Runs the command.
pub(super) fn run(arguments: &Flow, screen: &Screen) -> anyhow::Result<Outcome> {
    let name = || io::name_of(&arguments.problem);
    let text = io::read_text(&arguments.problem, PROBLEM_LIMIT)?;
    let document: FlowDocument = serde_json::from_str(&text).with_context(name)?;
    let problem = FlowProblem::new(&document).with_context(name)?;
    let plan = solve(&problem);
    screen.answer(&plan, people)?;
    Ok(if plan.objective > 0.0 {
        Outcome::Done
    } else {
        Outcome::GoalNotMet
    })
}

fn people(plan: &FlowPlan) -> String {
    let proof = if plan.gap > 0.0 {
        format!("{:.2} % below the bound", 100.0 * plan.gap)
    } else {
        "none, no placement carries more".to_owned()
    };
    let mut text = facts([
        ("carries", format!("{:.2} tokens/s", plan.objective)),
        (
            "bound",
            format!("{:.2} tokens/s by {}", plan.bound, plan.bound_method),
        ),
        ("gap", proof),
    ]);
    let mut table = Columns::new(["node", ">layers", ">tokens/s"]);
    for placed in &plan.placement {
        let own = plan.flows.iter().filter(|flow| flow.from == placed.node);
        let carried: f64 = own.map(|flow| flow.tokens_per_s).sum();
        table.row([
            placed.node.clone(),
            format!("{}..{}", placed.start, placed.end),
            format!("{carried:.2}"),
        ]);
    }
    text.push('\n');
    text.push_str(&table.to_string());
    text
}
