//! Identifiers: one type each, so that two of them cannot be swapped in a call.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $repr:ty, $label:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $repr);
        impl $name {
            /// Position in a `Vec` indexed by this id.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, concat!($label, " {}"), self.0)
            }
        }
    };
}

id!(/** A host: its position in the cluster. */ NodeId, u32, "node");
id!(/** A device, numbered through the whole cluster. On CPU it is one worker. */ GpuId, u32, "gpu");
id!(/** A switch: its position in the cluster. */ SwitchId, u32, "switch");
id!(/** A directed link: its position in the cluster. */ LinkId, u32, "link");
id!(/** A copy of the model: its position in the layout. */ ReplicaId, u32, "replica");
id!(/** A pipeline stage: its position in the replica. */ StageId, u32, "stage");
id!(/** A place in a tensor-parallel group. */ Rank, u32, "rank");
id!(/** A request of a trace or a service. */ RequestId, u64, "request");
id!(/** A sequence of tokens that owns KV blocks. */ SequenceId, u64, "sequence");
id!(/** A KV block of a replica's pool. */ KvBlockId, u32, "block");
id!(/** The number of a step in its replica's one dispatch order. */ StepId, u64, "step");
id!(/** The version of the layout that a replica runs. */ Epoch, u64, "epoch");
id!(/** The reign of one coordinator; a later one has a higher term. */ Term, u64, "term");
