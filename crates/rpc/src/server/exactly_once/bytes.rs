//! The bytes that a change writes: which they are, and its grant of them.

use dray_core::{Context, FileId};

use crate::server::exactly_once::plan::{self, Plan};
use crate::server::exactly_once::settle::Amend;
use crate::server::exactly_once::slots::Reexecution;
use crate::server::execute::{Files, span};
use crate::server::ranges::{RangeGrant, Span};
use crate::server::session::ServerSession;
use crate::wire::{CallRow, Changes, Extent, Intent};

/// The bytes that a call writes; none if it writes none, or its plan has them already. An append
/// writes all that is there, until it is known where it goes.
pub(crate) async fn written(
    session: &ServerSession,
    cx: &Context,
    (row, files): (&CallRow<'_>, &Files),
    data_bytes: usize,
    (plan, amend): (Option<&Plan>, Option<Amend>),
) -> Option<(FileId, Span)> {
    match (row.changes, row.intent, plan, amend) {
        (Changes::DataOfReply, _, _, Some(Amend::Put { id, .. })) => Some((id, Span::ALL)),
        (Changes::DataOfReply, Intent::Create { .. }, None, None) => {
            Some((plan::found_by_name(session, cx, row.intent).await?, Span::ALL))
        }
        (Changes::Data(file, extent), ..) => {
            let file = files.id(file).ok()?;
            // The bytes that were there before an append are not written.
            if let Some(end) = plan.and_then(|plan| plan.append_at) {
                return Some((file, Span::from(end)));
            }
            Some((file, amended(extent, data_bytes, amend)))
        }
        (
            Changes::DataOfReply
            | Changes::Nothing
            | Changes::Names
            | Changes::Leases
            | Changes::Attributes(_)
            | Changes::Redone,
            ..,
        ) => None,
    }
}

/// The bytes of a change, which is perhaps made again as it was begun before.
fn amended(extent: Extent, data_bytes: usize, amend: Option<Amend>) -> Span {
    if let Some(at) = amend.and_then(Amend::append_at) {
        return Span::bytes(at, data_bytes as u64);
    }
    match (extent, amend.and_then(Amend::copy_at_most)) {
        (Extent::Bytes { at, len_bytes }, Some(most)) => Span::bytes(at, len_bytes.min(most)),
        (extent, _) => span(extent, data_bytes),
    }
}

/// Waits until nobody else reads or writes these bytes. Answers the grant of a change that has
/// none of the file so far.
pub(crate) async fn take(
    session: &ServerSession,
    (file, span): (FileId, Span),
    plan: Option<&mut Plan>,
    again: Option<&mut Reexecution>,
) -> Option<RangeGrant> {
    let of_plan = plan.and_then(|plan| plan.grant_of(file));
    let Some(grant) = of_plan.or_else(|| again?.grant_of(file)) else {
        return Some(session.export.ranges.write(file, span).await);
    };
    grant.write(span).await;
    None
}

/// The stamp that a change has with its bytes.
pub(crate) fn stamp(
    plan: Option<&Plan>,
    again: Option<&Reexecution>,
    lone: Option<&RangeGrant>,
) -> Option<u64> {
    plan.and_then(Plan::stamp).or_else(|| again?.stamp()).or_else(|| lone?.stamp())
}
