//! The batch jobs of callers. The server asks for them when an administrator looks at its status.

use std::io;
use std::sync::{Arc, OnceLock};

use dray_core::{CallersJob, FindJobs};

use super::Link;
use crate::client::channel::Channel;
use crate::wire::{Input, get_callers};

/// The function that finds the jobs of callers, if there is one.
#[derive(Default)]
pub(super) struct JobFinder(OnceLock<FindJobs>);

impl Link {
    /// The first one stays.
    pub(crate) fn find_jobs_by(&self, find: FindJobs) {
        let _ = self.jobs.0.set(find); // as it says
    }

    /// Answers question `number` of the server on the connection that it came by; also without a
    /// known job, so that the server does not wait.
    pub(super) fn asked_for_jobs(
        &self,
        channel: &Arc<Channel>,
        number: u32,
        mut input: Input<'_>,
    ) -> io::Result<()> {
        let callers = get_callers(&mut input)?;
        let channel = Arc::downgrade(channel);
        let tell = move |jobs: Vec<CallersJob>| {
            if let Some(channel) = channel.upgrade() {
                channel.tell_jobs(number, &jobs);
            }
        };
        match self.jobs.0.get() {
            Some(find) => find(callers, Box::new(tell)),
            None => tell(Vec::new()),
        }
        Ok(())
    }
}
