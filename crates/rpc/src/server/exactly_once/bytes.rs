//! The bytes that a change writes: which they are, and its grant of them.

use dray_core::{Context, FileId};

use crate::server::exactly_once::plan::{self, Plan};
use crate::server::exactly_once::settle::Amend;
use crate::server::exactly_once::slots::Again;
use crate::server::execute::Files;
use crate::server::ranges::{RangeGrant, Span, bytes_changed};
use crate::server::session::Session;
use crate::wire::Call;

/// The bytes that a call writes; none if it writes none, or its plan has them already.
pub(crate) async fn written(
    session: &Session,
    cx: &Context,
    (call, files): (&Call<'_>, &Files),
    data_bytes: usize,
    (plan, amend): (Option<&Plan>, Option<Amend>),
) -> Option<(FileId, Span)> {
    if let (Call::Put { .. }, Some(Amend::Put { id, .. })) = (call, amend) {
        return Some((id, Span::ALL));
    }
    if let (Call::Create { .. }, None, None) = (call, plan, amend) {
        return Some((plan::cut_by(session, cx, call).await?, Span::ALL));
    }
    let of = |handle| Some(files.get(handle)?.id());
    let changed = match amend {
        Some(amend) => bytes_changed(&amend.apply(call.clone()), data_bytes, of),
        None => bytes_changed(call, data_bytes, of),
    };
    match (changed?, plan.and_then(|plan| plan.append_at)) {
        // What was there before an append is not written.
        ((file, _), Some(end)) => Some((file, Span::from(end))),
        (changed, None) => Some(changed),
    }
}

/// Waits until nobody else reads or writes these bytes. Answers the grant of a change that has
/// none of the file so far.
pub(crate) async fn take(
    session: &Session,
    (file, span): (FileId, Span),
    plan: Option<&mut Plan>,
    again: Option<&mut Again>,
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
    again: Option<&Again>,
    lone: Option<&RangeGrant>,
) -> Option<u64> {
    plan.and_then(Plan::stamp).or_else(|| again?.stamp()).or_else(|| lone?.stamp())
}
