//! What administrators see of slices, and have done with them.

use dray_cluster::ClusterView;
use dray_rpc::server::{Membership, ServerNumber};
use serde_json::{Value, json};

use super::{ProjectionSlices, SlicesByProjection};
use crate::control;

/// In place of a server's name: the one that is asked.
pub const THIS_SERVER: &str = "-";

impl ProjectionSlices {
    /// Who is there and who serves what, for the status. Null: the slices have not begun.
    pub fn report(&self) -> Value {
        let Some(membership) = self.membership() else { return Value::Null };
        let view = membership.view();
        let servers = self.projection.definition.servers.iter().zip(0..).map(|(server, number)| {
            json!({
                "server": server,
                "there": view.members.contains_key(&ServerNumber(number)),
                "drained": view.drained.contains(&ServerNumber(number)),
            })
        });
        let slices = view.slices.iter().map(|(name, (state, _))| {
            json!({
                "slice": name,
                "served_by": self.name_of(state.primary),
                "answered_here": self.served(name).is_some_and(|one| one.slice.is_primary()),
                "in_step": state.in_step,
                "epoch": state.epoch,
                "losses": state.loss.saturating_sub(1),
                "slice_recovering": state.recovering,
            })
        });
        let quiesced = view.quiesced.as_ref().map(|(mark, _)| {
            let not_quiet = view.not_quiet();
            let not_quiet = not_quiet.into_iter().filter_map(|server| self.name_of(server));
            json!({ "by": mark.by, "since": mark.since, "not_quiet": not_quiet.collect::<Vec<_>>() })
        });
        json!({
            "quiesced": quiesced,
            "etcd": view.etcd,
            "etcd_error": view.trouble,
            "may_answer": membership.lease().holds(),
            "members": servers.collect::<Vec<_>>(),
            "slices": slices.collect::<Vec<_>>(),
        })
    }

    fn name_of(&self, ServerNumber(number): ServerNumber) -> Option<&str> {
        self.projection.definition.servers.get(usize::from(number)).map(String::as_str)
    }

    /// Which of the projection's servers is meant.
    fn number_of(&self, server: &str) -> Option<ServerNumber> {
        let definition = &self.projection.definition;
        let position = match server {
            THIS_SERVER => Some(self.projection.position),
            host => {
                definition.position(host).or_else(|| definition.position(&format!("tcp://{host}")))
            }
        };
        position.and_then(|position| u16::try_from(position).ok()).map(ServerNumber)
    }

    /// The pairs of servers say who would serve a slice instead.
    fn other_of(&self, export: &str, server: ServerNumber) -> Option<ServerNumber> {
        let (_, short) = export.split_once('/')?;
        let (home, successor) = short.split_once('.')?;
        let (home, successor) = (home.parse().ok()?, successor.parse().ok()?);
        Some(ServerNumber(if home == server.0 { successor } else { home }))
    }

    /// The slices that a server serves.
    fn served_by(view: &ClusterView, server: ServerNumber) -> Vec<&str> {
        let theirs = view.slices.iter().filter(|(_, (state, _))| state.primary == server);
        theirs.map(|(name, _)| name.as_str()).collect()
    }

    /// Why a server cannot be drained now; none: it can.
    fn obstacle(&self, view: &ClusterView, server: ServerNumber) -> Option<String> {
        let name = self.name_of(server)?;
        if view.etcd.is_none() {
            return Some("etcd does not answer this server".to_owned());
        }
        if view.quiesced.is_some() {
            return Some(
                "it is quiesced, and nothing moves: `dray quiesce --undo` first".to_owned(),
            );
        }
        if !view.members.contains_key(&server) {
            return Some(format!("{name} is not there, and serves nothing"));
        }
        let has_backup = |slice: &&str| {
            let in_step = view.slices.get(*slice).is_some_and(|(state, _)| state.in_step);
            let other = self.other_of(slice, server);
            let takes_it = |one| view.members.contains_key(&one) && !view.drained.contains(&one);
            in_step && other.is_some_and(takes_it)
        };
        let mut alone = ProjectionSlices::served_by(view, server);
        alone.retain(|slice| !has_backup(slice));
        (!alone.is_empty()).then(|| {
            format!(
                "no other server that is not drained is in step with {}: `dray status` shows when one is",
                alone.join(", ")
            )
        })
    }
}

/// Answers `quiesce`, `resume` and `quiet`, of a projection.
pub async fn answer_quiesce(slices: &SlicesByProjection, word: &str, projection: &str) -> Value {
    let Some(slices) = slices.get(projection) else { return json!({ "unknown": true }) };
    let Some(membership) = slices.membership() else {
        return control::refusal(&format!("projection `{projection}` is starting"));
    };
    if membership.view().etcd.is_none() {
        return control::refusal(&format!(
            "projection `{projection}`: etcd does not answer this server"
        ));
    }
    if word != "quiet"
        && let Err(error) = membership.set_quiesced(word == "quiesce").await
    {
        return control::refusal(&format!("projection `{projection}`: etcd: {error}"));
    }
    slices.report()["quiesced"].clone()
}

/// Answers `drain`, `undrain` and `drained`, of a server of any of the projections.
pub async fn answer(slices: &SlicesByProjection, word: &str, server: &str) -> Value {
    let (mut found, mut left) = (0, Vec::new());
    for slices in slices.values() {
        let Some(number) = slices.number_of(server) else { continue };
        let Some(membership) = slices.membership() else {
            return control::refusal(&format!("projection `{}` is starting", slices.name()));
        };
        found += 1;
        let view = membership.view();
        if let Some(obstacle) = slices.obstacle(&view, number).filter(|_| word == "drain") {
            return control::refusal(&format!("projection `{}`: {obstacle}", slices.name()));
        }
        if word != "drained"
            && let Err(error) = membership.set_drained(number, word == "drain").await
        {
            return control::refusal(&format!("projection `{}`: etcd: {error}", slices.name()));
        }
        left.extend(ProjectionSlices::served_by(&view, number).iter().map(ToString::to_string));
    }
    json!({ "projections": found, "left": left })
}
