//! A layout as a person would draw it: replicas from top to bottom, stages as rows, ranks side by side.

use std::fmt::Write;

use infercluster_spec::ids::{Rank, ReplicaId, StageId};
use infercluster_spec::layout::{LayerGroup, Replica, ReplicaRole, Shard, Stage};
use infercluster_spec::memory::{self, Seats};
use infercluster_spec::{Bytes, Cluster, IndexRange, Layout, Model};

/// Widest line of a drawing in characters; ranks that do not fit side by side go on below.
pub const LINE_WIDTH: usize = 110;

/// Draws a valid layout. With a cluster, devices carry their type, speed and memory.
pub fn draw_layout(layout: &Layout, model: &Model, cluster: Option<&Cluster>) -> String {
    let drawing = Drawing {
        layout,
        model,
        cluster,
        seats: memory::seats(layout, model),
    };
    let mut text = drawing.title();
    for (index, replica) in layout.replicas.iter().enumerate() {
        drawing.replica(&mut text, ReplicaId(index as u32), replica);
    }
    text
}

struct Drawing<'a> {
    layout: &'a Layout,
    model: &'a Model,
    cluster: Option<&'a Cluster>,
    seats: Vec<Seats>,
}

impl Drawing<'_> {
    fn title(&self) -> String {
        let layout = self.layout;
        format!(
            "{}: {} layers, {} query heads on {} KV heads, {} columns\n{} reduction, {}, quantum {}, KV blocks of {} tokens in {}\n",
            layout.model,
            self.model.layers,
            self.model.query_heads,
            self.model.kv_heads,
            self.model.ffn,
            format!("{:?}", layout.reduction).to_lowercase(),
            layout.numerics,
            layout.quantum,
            layout.kv.block_size,
            layout.kv.dtype,
        )
    }

    fn replica(&self, text: &mut String, id: ReplicaId, replica: &Replica) {
        let role = match replica.role {
            ReplicaRole::Mixed => "prefill and decode",
            ReplicaRole::Prefill => "prefill",
            ReplicaRole::Decode => "decode",
        };
        let _ = writeln!(text, "\n{id}, {role}");
        for (index, stage) in replica.stages.iter().enumerate() {
            if index > 0 {
                text.push_str("          │ activations\n          ▼\n");
            }
            self.stage(text, id, StageId(index as u32), stage);
        }
    }

    fn stage(&self, text: &mut String, replica: ReplicaId, id: StageId, stage: &Stage) {
        for (index, group) in stage.layer_groups.iter().enumerate() {
            let layers = group.layers.len();
            let plural = if layers == 1 { "" } else { "s" };
            let head = if group.shards.iter().any(|shard| shard.vocab.is_some()) {
                ", then the LM head"
            } else {
                ""
            };
            let _ = writeln!(
                text,
                "{id}: layers {} ({layers} layer{plural}){head}",
                group.layers
            );
            let cells: Vec<Vec<String>> = (0..group.shards.len())
                .map(|rank| {
                    // Bytes belong to the whole seat and stand in its last box.
                    let whole_seat = index + 1 == stage.layer_groups.len();
                    self.cell(replica, id, Rank(rank as u32), group, whole_seat)
                })
                .collect();
            boxes(text, &cells);
        }
    }

    fn cell(
        &self,
        replica: ReplicaId,
        stage: StageId,
        rank: Rank,
        group: &LayerGroup,
        whole_seat: bool,
    ) -> Vec<String> {
        let shard = &group.shards[rank.index()];
        let mut lines = vec![format!("{rank}: {}", self.device(shard))];
        lines.push(format!("query heads {}", counted(shard.query_heads)));
        lines.push(self.kv_line(rank, group));
        lines.push(format!("columns     {}", counted(shard.mlp_columns)));
        if let Some(rows) = shard.output_rows {
            lines.push(format!("output rows {}", counted(rows)));
        }
        if let Some(rows) = shard.vocab {
            lines.push(format!("vocabulary  {}", counted(rows)));
        }
        if !shard.experts.is_empty() {
            lines.push(format!("experts     {}", shard.experts.len()));
        }
        let seat = self
            .seats
            .iter()
            .find(|seats| (seats.seat.replica, seats.seat.stage, seats.seat.rank) == (replica, stage, rank));
        if let Some(seat) = seat.filter(|_| whole_seat) {
            lines.extend(self.memory_lines(seat));
        }
        lines
    }

    fn device(&self, shard: &Shard) -> String {
        let Some(gpu) = self.cluster.and_then(|cluster| cluster.gpu(shard.gpu)) else {
            return shard.gpu.to_string();
        };
        let speed = match gpu.speed.value() {
            1.0 => String::new(),
            speed => format!(" at {speed}"),
        };
        format!("{}, {}{speed}", shard.gpu, gpu.device_type)
    }

    fn kv_line(&self, rank: Rank, group: &LayerGroup) -> String {
        let size = self.model.group_size();
        let own = group.shards[rank.index()].kv_heads(size);
        let others = group
            .shards
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != rank.index());
        let is_shared = |head: &u32| {
            others
                .clone()
                .any(|(_, other)| other.kv_heads(size).contains(*head))
        };
        let shared = own.iter().filter(is_shared).count();
        let note = if shared > 0 {
            format!(", {shared} of them also elsewhere")
        } else {
            String::new()
        };
        format!("KV heads    {}{note}", counted(own))
    }

    fn memory_lines(&self, seat: &Seats) -> [String; 2] {
        let token = Bytes(seat.memory.kv_block.0 / u64::from(self.layout.kv.block_size.max(1)));
        let gpu = self
            .cluster
            .and_then(|cluster| Some((cluster, cluster.gpu(seat.gpu)?)));
        let memory = gpu.and_then(|(cluster, gpu)| cluster.memory(gpu));
        let of = memory.map_or_else(String::new, |memory| format!(" of {memory}"));
        [
            format!("weights     {}{of}", seat.memory.weights),
            format!("KV a token  {token}"),
        ]
    }
}

fn counted(range: IndexRange) -> String {
    if range.is_empty() {
        "none".to_owned()
    } else {
        format!("{range} ({})", range.len())
    }
}

/// Cells side by side, in as many rows of boxes as the line width asks for.
fn boxes(text: &mut String, cells: &[Vec<String>]) {
    let width_of = |cell: &Vec<String>| cell.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = cells.iter().map(width_of).collect();
    let mut first = 0;
    while first < cells.len() {
        let mut used = 1;
        let fits = |width: &&usize| {
            used += **width + 3;
            used <= LINE_WIDTH
        };
        let count = widths[first..].iter().take_while(fits).count().max(1);
        row(text, &cells[first..first + count], &widths[first..first + count]);
        first += count;
    }
}

fn row(text: &mut String, cells: &[Vec<String>], widths: &[usize]) {
    let rule = |left: char, between: &str, right: char| {
        let parts: Vec<String> = widths.iter().map(|width| "─".repeat(width + 2)).collect();
        format!("{left}{}{right}\n", parts.join(between))
    };
    text.push_str(&rule('┌', "┬", '┐'));
    for line in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
        for (cell, width) in cells.iter().zip(widths) {
            let content = cell.get(line).map_or("", String::as_str);
            let _ = write!(text, "│ {content:<width$} ");
        }
        text.push_str("│\n");
    }
    text.push_str(&rule('└', "┴", '┘'));
}

#[cfg(test)]
mod tests {
    use infercluster_spec::layout::Reduction;

    use super::*;
    use crate::fixtures::model;
    use crate::proportional::{ProportionalRequest, proportional_layout};

    #[test]
    fn a_small_layout_is_drawn() {
        let model = model(3, 14, 2, 320);
        let request = ProportionalRequest {
            stages: Some("2:1".parse().unwrap()),
            heads: Some("9:5".parse().unwrap()),
            mlp: Some("1:0".parse().unwrap()),
            split_groups: true,
            reduction: Reduction::Fast,
            ..ProportionalRequest::equal(4)
        };
        let layout = proportional_layout(&model, &request).unwrap();
        let drawn = draw_layout(&layout, &model, None);
        let expected = "\
tiny: 3 layers, 14 query heads on 2 KV heads, 320 columns
fast reduction, cpu-f32/1, quantum 64, KV blocks of 16 tokens in f32

replica 0, prefill and decode
stage 0: layers 0..2 (2 layers)
┌────────────────────────────────────────────────┬────────────────────────────────────────────────┐
│ rank 0: gpu 0                                  │ rank 1: gpu 1                                  │
│ query heads 0..9 (9)                           │ query heads 9..14 (5)                          │
│ KV heads    0..2 (2), 1 of them also elsewhere │ KV heads    1..2 (1), 1 of them also elsewhere │
│ columns     0..320 (320)                       │ columns     none                               │
";
        assert!(drawn.starts_with(expected), "{drawn}");
        assert!(
            drawn.contains("stage 1: layers 2..3 (1 layer), then the LM head"),
            "{drawn}"
        );
        // KV a token of gpu 1: 2 layers x 1 head x 2 x 8 x 4 bytes.
        assert!(drawn.contains("KV a token  128 B"), "{drawn}");
    }

    #[test]
    fn many_ranks_go_on_below() {
        let model = model(1, 12, 12, 768);
        let layout = proportional_layout(&model, &ProportionalRequest::equal(12)).unwrap();
        let drawn = draw_layout(&layout, &model, None);
        assert!(
            drawn.lines().all(|line| line.chars().count() <= LINE_WIDTH),
            "{drawn}"
        );
        assert_eq!(drawn.matches('┌').count(), 4, "{drawn}");
    }
}
