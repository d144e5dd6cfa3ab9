//! The last row of the quickstart: the even layout under load becomes the planned one, between two tokens.
//!
//! The layouts that are served here have the shares of the judged ones in the `invariant` reduction: only there
//! every logit has the same bits before, while and after, so that each answer can be compared with the undisturbed
//! one.

use infercluster_executor::bench::{self, MigrationBench};
use infercluster_planner::proportional::{ProportionalRequest, proportional_layout};
use infercluster_planner::proportions::Proportions;
use infercluster_spec::layout::{Reduction, Shard};
use infercluster_spec::{Bytes, Layout, Model};
use serde::Serialize;

use crate::rig::Rig;

/// Clients, and the lengths of their requests.
const CLIENTS: u32 = 8;
const PROMPT_TOKENS: u32 = 32;
const NEW_TOKENS: u32 = 48;
/// A long prompt would be in prefill: none here, `bench migrate` does that.
const LONG_PROMPT_TOKENS: u32 = 64;

/// Far more than all requests together need.
const KV_BLOCKS: u32 = 512;

/// What the change cost. There is none of these where a request failed or one bit of its logits differed: the run
/// ends with that error.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Migrated {
    /// Of the layouts that were served.
    reduction: Reduction,
    /// Gap of a stream from its last token of the old layout to its first of the new one, milliseconds.
    pause_p50_ms: f64,
    pause_worst_ms: f64,
    /// Usual gap between tokens before.
    itl_before_p50_ms: f64,
    /// Steps that were computed while the change was prepared and KV was copied.
    steps_meanwhile: u64,
    kv_bytes_moved: u64,
    /// Requests that ran through it and back again.
    requests: u64,
    failed: u64,
    /// Whether every logits hash was that of the undisturbed run.
    hashes_equal: bool,
}

/// Serves the first layout, changes to the second and back. A request that fails or comes out differently fails
/// this.
pub(super) fn run(rig: &Rig, even: &Layout, planned: &Layout, requests: u64) -> anyhow::Result<Migrated> {
    let from = invariant(&rig.model, even)?;
    let other = invariant(&rig.model, planned)?;
    let mut options = rig.options(&from, Some(rig.memory()))?;
    // What memory leaves differs between the layouts, and a pool keeps its size.
    options.kv_blocks = Some(KV_BLOCKS);
    let outcome = bench::migrate(
        &MigrationBench {
            options,
            other,
            rounds: 1,
            prefills: 0,
            clients: CLIENTS.min(u32::try_from(requests).unwrap_or(CLIENTS)).max(1),
            prompt_tokens: PROMPT_TOKENS,
            new_tokens: NEW_TOKENS,
            long_prompt_tokens: LONG_PROMPT_TOKENS,
            long_new_tokens: NEW_TOKENS,
            seed: 1,
        },
        |_| (),
    )?;
    let there = &outcome.migrations[0];
    Ok(Migrated {
        reduction: Reduction::Invariant,
        pause_p50_ms: 1e3 * there.pause_s.p50,
        pause_worst_ms: 1e3 * there.pause_s.max,
        itl_before_p50_ms: 1e3 * there.itl_before_s.p50,
        steps_meanwhile: there.steps_meanwhile,
        kv_bytes_moved: there.kv_bytes_moved.0,
        requests: outcome.requests,
        failed: 0,
        hashes_equal: true,
    })
}

impl Migrated {
    /// One line.
    pub(super) fn people(&self) -> String {
        format!(
            "even to planned under load: pause p50 {:.1} ms, worst {:.1} ms (usual gap {:.1} ms), {} steps \
             meanwhile, {} of KV moved; {} requests, {} failed, every logits hash as undisturbed (layouts in the \
             invariant reduction)",
            self.pause_p50_ms,
            self.pause_worst_ms,
            self.itl_before_p50_ms,
            self.steps_meanwhile,
            Bytes(self.kv_bytes_moved),
            self.requests,
            self.failed
        )
    }
}

/// The same shares of heads and columns, reduced so that the order of sums does not depend on the cut.
fn invariant(model: &Model, layout: &Layout) -> anyhow::Result<Layout> {
    let stage = &layout.replicas[0].stages[0];
    let shards = || stage.layer_groups.iter().take(1).flat_map(|group| &group.shards);
    let shares = |share: fn(&Shard) -> u32| Proportions::new(shards().map(share).collect());
    let mut request = ProportionalRequest::equal(layout.gpus.len() as u32);
    request.heads = Some(shares(|shard| shard.query_heads.len())?);
    request.mlp = Some(shares(|shard| shard.mlp_columns.len())?);
    request.split_groups = true;
    request.quantum = layout.quantum;
    request.reduction = Reduction::Invariant;
    request.kv = layout.kv;
    Ok(proportional_layout(model, &request)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::model::Preset;

    #[test]
    fn shares_survive_the_change_of_reduction() {
        let model = Preset::Quick.model("m");
        let mut request = ProportionalRequest::equal(2);
        request.heads = Some("6:2".parse().unwrap());
        request.mlp = Some("1472:576".parse().unwrap());
        let fast = proportional_layout(&model, &request).unwrap();
        let found = invariant(&model, &fast).unwrap();
        assert_eq!(found.reduction, Reduction::Invariant);
        for (fast, found) in fast.replicas[0].stages[0].layer_groups[0]
            .shards
            .iter()
            .zip(&found.replicas[0].stages[0].layer_groups[0].shards)
        {
            assert_eq!(fast.query_heads, found.query_heads);
            assert_eq!(fast.mlp_columns, found.mlp_columns);
        }
    }
}
