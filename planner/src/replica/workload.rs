//! The shape of a steady step: how many sequences decode, how long their contexts are, and how much prefill
//! goes with each generated token.

use infercluster_spec::{BatchShape, Trace};

/// What a replica has to serve at any moment, as means over a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Sequences that decode at the same time.
    pub sequences: u32,
    /// Mean tokens in the cache of a decoding sequence.
    pub mean_context: u64,
    /// Prompt tokens that are computed for each generated token.
    pub prefill_per_decode: f64,
    /// Length of the prompt that a prompt token belongs to, on average: long prompts count by their tokens.
    pub mean_prompt: u64,
}

impl Workload {
    /// Decoding alone.
    pub fn decode(sequences: u32, mean_context: u64) -> Self {
        Self {
            sequences,
            mean_context,
            prefill_per_decode: 0.0,
            mean_prompt: 0,
        }
    }

    /// The steady state of a trace's lengths with `sequences` of them in flight; `None` for an empty trace.
    ///
    /// A request spends its output tokens at contexts from its prompt to its end, so the mean context weighs
    /// requests by their output.
    pub fn of_trace(trace: &Trace, sequences: u32) -> Option<Self> {
        let (mut inputs, mut squares, mut outputs, mut contexts) = (0.0, 0.0, 0.0, 0.0);
        for request in &trace.requests {
            let (input, output) = (request.input.as_f64(), request.output.as_f64());
            inputs += input;
            squares += input * input;
            outputs += output;
            contexts += output * (input + output / 2.0);
        }
        if outputs == 0.0 {
            return None;
        }
        Some(Self {
            sequences,
            mean_context: (contexts / outputs).ceil() as u64,
            prefill_per_decode: inputs / outputs,
            mean_prompt: if inputs > 0.0 {
                (squares / inputs).ceil() as u64
            } else {
                0
            },
        })
    }

    /// One step of `sequences` of them. Prefill is a chunk of prompts of the mean length, each token of which
    /// sees half of its prompt on average.
    pub fn shape(&self, sequences: u32) -> BatchShape {
        let decoding = u64::from(sequences);
        let prefill = (decoding as f64 * self.prefill_per_decode).round() as u64;
        let prompts_ending = prefill.checked_div(self.mean_prompt).unwrap_or(0);
        BatchShape {
            new_tokens: decoding.saturating_add(prefill),
            prefill_new: prefill,
            prefill_score_pairs: (prefill as f64 * (self.mean_prompt as f64 + 1.0) / 2.0) as u64,
            prefill_kv_tokens: if prefill > 0 {
                prefill.max(self.mean_prompt)
            } else {
                0
            },
            decode_sequences: decoding,
            decode_kv_tokens: decoding.saturating_mul(self.mean_context),
            logits_rows: decoding.saturating_add(prompts_ending),
        }
    }

    /// Tokens whose KV the replica keeps, in whole blocks.
    pub fn kv_tokens(&self, block_size: u32) -> u64 {
        let block = u64::from(block_size);
        let context = self.mean_context.div_ceil(block).saturating_mul(block);
        context.saturating_mul(u64::from(self.sequences))
    }
}

#[cfg(test)]
mod tests {
    use infercluster_spec::{Request, RequestId, Tokens};

    use super::*;

    #[test]
    fn a_trace_by_hand() {
        let request = |input, output| Request {
            id: RequestId(0),
            arrival: None,
            input: Tokens(input),
            output: Tokens(output),
            block_hashes: Vec::new(),
        };
        let trace = Trace {
            requests: vec![request(100, 10), request(300, 30)],
            ..Trace::default()
        };
        let workload = Workload::of_trace(&trace, 4).unwrap();
        // Contexts: (10 x 105 + 30 x 315) / 40 = 262.5; prompts by token: (100^2 + 300^2) / 400 = 250.
        assert_eq!((workload.mean_context, workload.mean_prompt), (263, 250));
        assert_eq!(workload.prefill_per_decode, 10.0);
        let shape = workload.shape(4);
        assert_eq!(
            (shape.new_tokens, shape.prefill_new, shape.decode_kv_tokens),
            (44, 40, 1052)
        );
        // 40 tokens of 125.5 pairs each.
        assert_eq!(shape.prefill_score_pairs, 5020);
        assert_eq!(workload.kv_tokens(16), 4 * 272);
        assert_eq!(Workload::of_trace(&Trace::default(), 4), None);
    }
}
