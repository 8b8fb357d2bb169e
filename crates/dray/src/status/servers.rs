//! What a mount says of the servers of its projection.

use dray_client::{ClientConnection, ClientProjection, SessionStatus};
use dray_layers::placement::{ServerIndex, SliceIndex};
use serde_json::{Value, json};

use super::report::server;

/// Each server of a projection, in the order of the definition, with its part of all calls. With failover those
/// sessions count as a server's that it served last.
pub fn servers(projection: &ClientProjection, connection: &ClientConnection) -> Vec<Value> {
    if !projection.slices().placement().fails_over() {
        let each = connection.sessions().iter().map(|session| server(&[session.status()]));
        return with_shares(each.collect());
    }
    let names = &projection.definition.servers;
    let mut sessions: Vec<Vec<SessionStatus>> = vec![Vec::new(); names.len()];
    for (index, session) in connection.sessions().iter().enumerate() {
        if session.has_begun() {
            let status = session.status();
            let ServerIndex(home) = projection.slices().home_of(SliceIndex(index as u16));
            let serving = names.iter().position(|name| *name == status.target);
            sessions[serving.unwrap_or(usize::from(home))].push(status);
        }
    }
    let each = names.iter().zip(sessions).map(|(name, sessions)| {
        let mut server = server(&sessions);
        server["address"] = json!(name);
        let slices = sessions.iter().map(|one| one.export.rsplit('/').next().unwrap_or_default());
        server["slices"] = slices.collect::<Vec<&str>>().into();
        server
    });
    with_shares(each.collect())
}

/// How evenly load lies: each server of a projection with its part of all calls, per cent.
fn with_shares(mut servers: Vec<Value>) -> Vec<Value> {
    let calls = |server: &Value| server["calls"].as_f64().unwrap_or(0.0);
    let all = servers.iter().map(calls).sum::<f64>().max(1.0);
    for server in &mut servers {
        server["calls_percent"] = json!((calls(server) * 1000.0 / all).round() / 10.0);
    }
    servers
}
