//! What rules look at, and the values that they name.

use dray_core::Op;

/// What a rule looks at, the most telling first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleKey {
    /// The batch job.
    Job,
    /// The user.
    User,
    /// One of the user's groups.
    Group,
    /// The project of the file, or of the directory where something is made (see `chattr -p`).
    Project,
    /// The address of the client.
    Node,
    /// The kind of operation.
    Op,
}

impl RuleKey {
    /// All, the most telling first.
    pub const ALL: [RuleKey; 6] =
        [RuleKey::Job, RuleKey::User, RuleKey::Group, RuleKey::Project, RuleKey::Node, RuleKey::Op];

    /// As administrators write it.
    pub fn name(self) -> &'static str {
        match self {
            RuleKey::Job => "job",
            RuleKey::User => "user",
            RuleKey::Group => "group",
            RuleKey::Project => "project",
            RuleKey::Node => "node",
            RuleKey::Op => "op",
        }
    }

    /// The key of that name.
    pub fn named(name: &str) -> Option<RuleKey> {
        RuleKey::ALL.into_iter().find(|key| key.name() == name)
    }
}

/// One value that a key may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// A text, in which `*` is any number of characters, and `?` is one.
    Text(String),
    /// Ids from the first to the last.
    Ids(u32, u32),
    /// Operations, a bit for each by its number.
    Ops(u64),
}

impl Pattern {
    /// Operations by name: one, or `data`, `metadata`, `all`.
    pub fn op(name: &str) -> Option<Pattern> {
        let bit = |op: Op| 1 << (op as u64);
        let moving = Op::ALL.iter().copied().filter(|op| op.facts().moves_data);
        let data = moving.map(bit).fold(0, |all: u64, one| all | one);
        let all = Op::ALL.iter().copied().map(bit).fold(0, |all: u64, one| all | one);
        Some(Pattern::Ops(match name {
            "data" => data,
            "metadata" => all & !data,
            "all" | "*" => all,
            name => bit(Op::ALL.iter().copied().find(|op| op.name() == name)?),
        }))
    }

    pub(super) fn is_exact(&self) -> bool {
        match self {
            Pattern::Text(text) => !text.contains(['*', '?']),
            Pattern::Ids(first, last) => first == last,
            Pattern::Ops(ops) => ops.count_ones() == 1,
        }
    }

    pub(super) fn meets(&self, other: &Pattern) -> bool {
        match (self, other) {
            (Pattern::Text(one), Pattern::Text(other)) => {
                can_meet(one.as_bytes(), other.as_bytes())
            }
            (Pattern::Ids(a, b), Pattern::Ids(c, d)) => a.max(c) <= b.min(d),
            (Pattern::Ops(one), Pattern::Ops(other)) => one & other != 0,
            (Pattern::Text(_) | Pattern::Ids(..) | Pattern::Ops(_), _) => false,
        }
    }
}

/// Whether there is a text that both patterns match.
fn can_meet(one: &[u8], other: &[u8]) -> bool {
    // `row[j]`: the rest of `one` from here and `other[j..]` can meet.
    let mut below = vec![false; other.len() + 1];
    for i in (0..=one.len()).rev() {
        let mut row = vec![false; other.len() + 1];
        for j in (0..=other.len()).rev() {
            row[j] = match (one.get(i), other.get(j)) {
                (None, None) => true,
                (Some(b'*'), None) => below[j],
                (Some(b'*'), Some(_)) => below[j] || row[j + 1],
                (None, Some(b'*')) => row[j + 1],
                (Some(_), Some(b'*')) => row[j + 1] || below[j],
                (Some(a), Some(b)) => (a == b || *a == b'?' || *b == b'?') && below[j + 1],
                (None, Some(_)) | (Some(_), None) => false,
            };
        }
        below = row;
    }
    below[0]
}
