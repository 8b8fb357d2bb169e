//! How a server becomes a member: its definition is the one of the others, and nobody has its place.

use std::fmt;

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, GetOptions, GetResponse, PutOptions, Txn, TxnOp,
    TxnOpResponse,
};

use crate::connection::MembershipLoss;
use crate::keys::end_of;
use crate::records::{self, DefinitionRecord, MemberRecord};
use crate::shared::ClusterShared;

/// Why a server cannot be a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinRefusal(String);

impl JoinRefusal {
    pub(crate) fn has_left() -> JoinRefusal {
        JoinRefusal("it has left".to_owned())
    }
}

impl fmt::Display for JoinRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for JoinRefusal {}

/// What came of an attempt.
pub(crate) enum Joined {
    /// The server is a member, by this lease.
    Member,
    /// The server can become one later; what it waits for.
    Later(String),
    /// The server cannot be one.
    Never(JoinRefusal),
}

/// Makes this server a member by the lease, which has to be alive.
pub(crate) async fn join(
    shared: &ClusterShared,
    client: &Client,
    lease: i64,
) -> Result<Joined, MembershipLoss> {
    let found = StoredRecords::read(shared, client).await?;
    if let Some(outcome) = found.obstacle(shared) {
        return Ok(outcome);
    }
    let transaction = found.transaction(shared, lease);
    let done = client.kv_client().txn(transaction).await?;
    match done.succeeded() {
        true => Ok(Joined::Member),
        false => Ok(Joined::Later("another server that starts at the same time".to_owned())),
    }
}

/// What stands in etcd before a server joins.
struct StoredRecords {
    /// With its revision.
    definition: Option<(DefinitionRecord, i64)>,
    /// In the place of this server, with its revision.
    own: Option<(MemberRecord, i64)>,
    others: Vec<MemberRecord>,
}

impl StoredRecords {
    async fn read(
        shared: &ClusterShared,
        client: &Client,
    ) -> Result<StoredRecords, MembershipLoss> {
        let keys = &shared.keys;
        let prefix = Some(GetOptions::new().with_prefix());
        let gets = [TxnOp::get(keys.definition(), None), TxnOp::get(keys.members(), prefix)];
        let answer = client.kv_client().txn(Txn::new().and_then(gets)).await?;
        let answers = answer.op_responses();
        let [TxnOpResponse::Get(definition), TxnOpResponse::Get(members)] = &answers[..] else {
            return Err(MembershipLoss::because(
                "etcd answered something else than it was asked for",
            ));
        };
        StoredRecords::of(shared, definition, members)
    }

    fn of(
        shared: &ClusterShared,
        definition: &GetResponse,
        members: &GetResponse,
    ) -> Result<StoredRecords, MembershipLoss> {
        let definition = match definition.kvs().first() {
            None => None,
            Some(found) => {
                let record = records::read(found.value()).map_err(MembershipLoss::because)?;
                Some((record, found.mod_revision()))
            }
        };
        let mine = shared.keys.member(shared.options.me);
        let (mut own, mut others) = (None, Vec::new());
        for found in members.kvs() {
            let member: MemberRecord = records::read(found.value()).unwrap_or_default();
            match found.key() == mine.as_bytes() {
                true => own = Some((member, found.mod_revision())),
                false => others.push(member),
            }
        }
        Ok(StoredRecords { definition, own, others })
    }

    /// What keeps this server from joining now.
    fn obstacle(&self, shared: &ClusterShared) -> Option<Joined> {
        let options = &shared.options;
        if let Some((other, _)) = self.own.as_ref().filter(|(own, _)| own.holder != options.holder)
        {
            return Some(Joined::Later(format!(
                "the end of another process that is server {} of `{}`, with the state directory {}",
                options.server, options.projection, other.holder
            )));
        }
        let (definition, _) = self.definition.as_ref()?;
        if definition.fingerprint == fingerprint(shared) || self.others.is_empty() {
            return None;
        }
        let others: Vec<&str> = self.others.iter().map(|other| other.server.as_str()).collect();
        Some(Joined::Never(JoinRefusal(format!(
            "projection `{}`: its servers have the definition {}, and the file of this one is the \
             definition {}: give all the same file, or stop all ({}) before a new definition counts",
            options.projection,
            definition.fingerprint,
            fingerprint(shared),
            others.join(", ")
        ))))
    }

    /// Becomes a member if all is as it was found. Where the definition is another one, nobody is there
    /// who has it: it is replaced, and what it called slices is forgotten.
    fn transaction(&self, shared: &ClusterShared, lease: i64) -> Txn {
        let (keys, options) = (&shared.keys, &shared.options);
        let mine = keys.member(options.me);
        let revision = |found: Option<i64>| found.unwrap_or(0); // as etcd compares what is not there
        let definition = self.definition.as_ref().map(|(_, revision)| *revision);
        let own = self.own.as_ref().map(|(_, revision)| *revision);
        let mut when = vec![
            Compare::mod_revision(keys.definition(), CompareOp::Equal, revision(definition)),
            Compare::mod_revision(mine.clone(), CompareOp::Equal, revision(own)),
        ];
        let member = MemberRecord {
            server: options.server.clone(),
            holder: options.holder.clone(),
            since: dray_rt::wall_clock().as_secs(),
        };
        let mut then = vec![
            TxnOp::put(mine.clone(), records::written(member), by(lease)),
            // Of the process before this one.
            TxnOp::delete(keys.drained(options.me), None),
        ];
        let fingerprint = fingerprint(shared);
        let known = self.definition.as_ref().map(|(definition, _)| &definition.fingerprint);
        if known != Some(&fingerprint) {
            let text = options.definition.clone();
            let record = records::written(DefinitionRecord { fingerprint, text });
            then.push(TxnOp::put(keys.definition(), record, None));
            then.push(TxnOp::delete(keys.slices(), Some(DeleteOptions::new().with_prefix())));
            when.extend(nobody_else(&keys.members(), &mine));
        }
        Txn::new().when(when).and_then(then)
    }
}

fn by(lease: i64) -> Option<PutOptions> {
    Some(PutOptions::new().with_lease(lease))
}

fn fingerprint(shared: &ClusterShared) -> String {
    format!("{:016x}", shared.options.fingerprint)
}

/// There is no key below `members` but `mine`. A range without keys compares as one that was never
/// created (etcd, server/etcdserver/apply.go, `applyCompare`).
fn nobody_else(members: &str, mine: &str) -> [Compare; 2] {
    let behind_mine = format!("{mine}\0");
    let absent = |from: &str| Compare::create_revision(from, CompareOp::Equal, 0);
    [absent(members).with_range(mine), absent(&behind_mine).with_range(end_of(members))]
}
