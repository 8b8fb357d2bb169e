//! Answers that the server has leased to this session (ADR 0049).

use std::sync::OnceLock;

use dray_core::HearRecalls;

/// Whether a session wants leases, and who checks the permissions of callers then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseWish {
    /// It wants none.
    #[default]
    No,
    /// It wants them.
    Yes {
        /// The front end's kernel checks what each caller may do. If it does not, a remembered name
        /// answers only callers with the identity of the one that asked the server.
        callers_are_checked: bool,
    },
}

/// What the session remembers under leases.
#[derive(Default)]
pub(crate) struct LeasedAnswers {
    listener: OnceLock<HearRecalls>,
}

impl LeasedAnswers {
    /// The first one stays.
    pub(crate) fn hear_recalls_by(&self, hear: HearRecalls) {
        let _ = self.listener.set(hear); // as it says
    }
}
