//! Protocol bugs that tests plant, to see that the checkers find them. Outside tests there are none.

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A sender counts a mirrored step as delivered without sending it.
    SkipTail,
    /// A rank says ready before its shadow is verified.
    ReadyBeforeVerify,
    /// Orders and headers of an earlier term are followed.
    AcceptStaleTerm,
    /// Old shards go with the record, not with the last rank that settles.
    ReleaseEarly,
    /// The first step of a layout does not wait for its marks.
    SwitchWithoutMarks,
    /// Steps of the new layout leave before the record is durable.
    DispatchBeforeRecord,
    /// A loss after the record brings the old layout back.
    AbortAfterRecord,
    /// Units are told apart by their sequence only.
    ForgetIncarnation,
    /// The record names a step that was dispatched.
    PastStep,
    /// A new owner takes a gap in a unit for its tokens.
    AcceptGap,
}

/// Which bug is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Planted {
    #[cfg(test)]
    pub(super) fault: Option<Fault>,
}

impl Planted {
    #[cfg(test)]
    pub(super) fn is(self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(test))]
    pub(super) fn is(self, _: Fault) -> bool {
        false
    }
}
