//! Counts the faults of a run. A run without faults proves nothing.

use std::ops::AddAssign;

use dray_fabric::sim::Counts;

use super::machine::ServerMachine;

/// Counts of faults, of one run or of many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Times that the server process died, by a loss of power or without.
    pub deaths: u64,
    /// Times that the server's machine lost power.
    pub power_losses: u64,
    /// Clients that crashed.
    pub client_crashes: u64,
    /// Clients that the administrator had go.
    pub evictions: u64,
    /// Changes that reached a server more than once, by a death of it, a lost reply, or late.
    pub duplicates: u64,
    /// What the network did.
    pub network: Counts,
}

impl FaultCounts {
    /// Counts of a site so far. Of its clients `client_crashes` crashed and `evictions` were evicted.
    pub(super) fn of(
        machine: &ServerMachine,
        network: Counts,
        (client_crashes, evictions): (u64, u64),
    ) -> FaultCounts {
        FaultCounts {
            deaths: machine.deaths(),
            power_losses: machine.power_losses(),
            client_crashes,
            evictions,
            duplicates: machine.repeated(),
            network,
        }
    }

    /// Each kind, in the words of a network's textbook: dropped, delayed, duplicated, reordered.
    pub fn each(&self) -> [(&'static str, u64); 11] {
        [
            ("messages dropped", self.network.lost),
            ("messages delayed over the end of their connection", self.network.late),
            ("changes duplicated", self.duplicates),
            ("messages reordered", self.network.overtaken),
            ("partitions", self.network.partitions),
            ("replies lost", self.network.lost_replies),
            ("connections broken", self.network.breaks),
            ("deaths of the server", self.deaths),
            ("losses of power", self.power_losses),
            ("crashes of clients", self.client_crashes),
            ("evictions of clients", self.evictions),
        ]
    }
}

impl AddAssign for FaultCounts {
    fn add_assign(&mut self, more: FaultCounts) {
        self.deaths += more.deaths;
        self.power_losses += more.power_losses;
        self.client_crashes += more.client_crashes;
        self.evictions += more.evictions;
        self.duplicates += more.duplicates;
        let (sum, more) = (&mut self.network, more.network);
        sum.frames += more.frames;
        sum.lost += more.lost;
        sum.lost_replies += more.lost_replies;
        sum.late += more.late;
        sum.overtaken += more.overtaken;
        sum.breaks += more.breaks;
        sum.partitions += more.partitions;
    }
}
