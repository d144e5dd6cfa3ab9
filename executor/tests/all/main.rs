//! What the executor promises, on made models and real sockets, in one binary.

mod failures;
mod golden;
mod handshake;
mod layouts;
mod migration;
mod migration_plans;
mod migration_terms;
mod numerics;
mod service;
mod support;
