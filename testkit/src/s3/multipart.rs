//! Objects that arrive in parts: the operations on [`Uploads`](super::uploads::Uploads).

use super::answers::{encode, etag, failed};
use super::conditions::Condition;
use super::digests::{Algorithm, Checksum, matches};
use super::draft::{About, Draft};
use super::pieces::Pieces;
use super::state::Service;
use super::uploads::{Part as Held, Upload};
use super::writes::{Source, about, receive, told};
use bytes::Bytes;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};
use std::collections::BTreeMap;

const PARTS_MAX: i32 = 10_000;
const PAGE_MAX: usize = 1000;

pub(super) fn create(
    service: &Service,
    input: CreateMultipartUploadInput,
) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
    service.bucket(&input.bucket)?;
    let wanted = input.checksum_algorithm.filter(|_| !service.lies.no_checksums);
    let algorithm = wanted.map(|name| Algorithm::named(name.as_str())).transpose()?;
    let upload = Upload {
        initiated: service.guard.now(),
        about: about(input.content_type, input.metadata)?,
        algorithm,
        composite: input.checksum_type.is_some_and(|kind| kind.as_str() == ChecksumType::COMPOSITE),
        parts: BTreeMap::new(),
    };
    let output = CreateMultipartUploadOutput {
        checksum_algorithm: algorithm.map(|algorithm| ChecksumAlgorithm::from_static(algorithm.name())),
        upload_id: Some(service.uploads.open(&input.bucket, &input.key, upload)),
        bucket: Some(input.bucket),
        key: Some(input.key),
        ..CreateMultipartUploadOutput::default()
    };
    Ok(S3Response::new(output))
}

fn check_number(number: i32) -> S3Result<()> {
    if (1..=PARTS_MAX).contains(&number) {
        return Ok(());
    }
    Err(s3_error!(InvalidArgument, "part number must be an integer between 1 and {PARTS_MAX}, inclusive"))
}

/// Replaces the part of that number.
fn hold(service: &Service, name: (&str, &str, &str), number: i32, part: Held) -> S3Result<()> {
    let replaced = || {
        service
            .uploads
            .with(name, |upload| Ok(upload.parts.get(&number).map_or(0, |part| part.body.len() as u64)))
    };
    service.quota.within((&service.buckets, &service.uploads), part.body.len() as u64, replaced, || {
        service.uploads.with(name, |upload| {
            upload.parts.insert(number, part);
            Ok(())
        })
    })
}

pub(super) async fn put_part(
    service: &Service,
    req: S3Request<UploadPartInput>,
) -> S3Result<S3Response<UploadPartOutput>> {
    let input = req.input;
    check_number(input.part_number)?;
    let name = (&*input.bucket, &*input.key, &*input.upload_id);
    let (body, checksum) =
        receive(input.body, &req.headers, req.trailing_headers, service.lies.no_checksums).await?;
    let wanted = service.uploads.with(name, |upload| Ok(upload.algorithm))?;
    let brought = checksum.as_ref().map(|sum| sum.algorithm);
    if wanted.is_some() && wanted != brought {
        let [wanted, brought] = [wanted, brought].map(|sum| sum.map_or("null", Algorithm::name));
        let why = format!("expected checksum type: {wanted}, actual checksum type: {brought}");
        return Err(s3_error!(InvalidRequest, "checksum type mismatch occurred, {why}"));
    }
    let headers = told(checksum.as_ref());
    let etag = service.uploads.part_etag(&body);
    let part = Held { body, etag: etag.clone(), modified: service.guard.now(), checksum };
    hold(service, name, input.part_number, part)?;
    let output = UploadPartOutput { e_tag: Some(ETag::Strong(etag)), ..UploadPartOutput::default() };
    Ok(S3Response::with_headers(output, headers))
}

pub(super) async fn copy_part(
    service: &Service,
    input: UploadPartCopyInput,
) -> S3Result<S3Response<UploadPartCopyOutput>> {
    check_number(input.part_number)?;
    let name = (&*input.bucket, &*input.key, &*input.upload_id);
    let wanted = service.uploads.with(name, |upload| Ok(upload.algorithm))?;
    let source = Source::find(
        service,
        &input.copy_source,
        input.copy_source_if_match.as_ref(),
        input.copy_source_if_none_match.as_ref(),
    )?;
    let size = source.meta.size;
    let range = match &input.copy_source_range {
        None => 0..size,
        Some(text) => {
            let bounds = text.strip_prefix("bytes=").and_then(|bounds| bounds.split_once('-'));
            let bounds = bounds.and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
            let (first, last): (u64, u64) =
                bounds.ok_or_else(|| s3_error!(InvalidArgument, "the copy source range is not bytes=a-b"))?;
            if first > last || last >= size {
                return Err(s3_error!(InvalidArgument, "range is not valid for a source of {size} bytes"));
            }
            first..last + 1
        }
    };
    let body = source.read(range, service.limits.copy_max).await?;
    let checksum = wanted.map(|algorithm| algorithm.of(&body));
    let body: Bytes = body.iter().flatten().copied().collect();
    let (etag, modified) = (service.uploads.part_etag(&body), service.guard.now());
    let [checksum_crc32, checksum_crc32c, checksum_crc64nvme] = Checksum::fields(checksum.as_ref());
    hold(service, name, input.part_number, Held { body, etag: etag.clone(), modified, checksum })?;
    let result = CopyPartResult {
        e_tag: Some(ETag::Strong(etag)),
        last_modified: Some(modified.into()),
        checksum_crc32,
        checksum_crc32c,
        checksum_crc64nvme,
        ..CopyPartResult::default()
    };
    let output = UploadPartCopyOutput { copy_part_result: Some(result), ..UploadPartCopyOutput::default() };
    Ok(S3Response::new(output))
}

/// The parts that a client names, in order. Err: they are not what was uploaded.
fn chosen<'a>(upload: &'a Upload, named: &[CompletedPart], part_min: u64) -> S3Result<Vec<&'a Held>> {
    let numbers: Vec<i32> = named.iter().map(|part| part.part_number.unwrap_or(0)).collect();
    if numbers.is_empty() {
        return Err(s3_error!(MalformedXML, "an object has at least one part"));
    }
    if !numbers.is_sorted_by(|first, second| first < second) {
        return Err(s3_error!(InvalidPartOrder, "the list of parts was not in ascending order"));
    }
    let invalid = |number: i32| s3_error!(InvalidPart, "part {number} was not uploaded, or is another one");
    let mut parts = Vec::new();
    for (number, claimed) in numbers.iter().zip(named) {
        let held = upload.parts.get(number).ok_or_else(|| invalid(*number))?;
        let sums = [&claimed.checksum_crc32, &claimed.checksum_crc32c, &claimed.checksum_crc64nvme];
        let told = Checksum::fields(held.checksum.as_ref());
        let differs = sums.into_iter().zip(&told).any(|(claimed, told)| claimed.is_some() && claimed != told);
        if differs || claimed.e_tag.as_ref().map(ETag::value) != Some(&held.etag) {
            return Err(invalid(*number));
        }
        parts.push(held);
    }
    let (_last, others) = parts.split_last().expect("not empty: checked above");
    if others.iter().any(|part| (part.body.len() as u64) < part_min) {
        return Err(s3_error!(EntityTooSmall, "each part but the last has at least {part_min} bytes"));
    }
    Ok(parts)
}

pub(super) fn complete(
    service: &Service,
    req: S3Request<CompleteMultipartUploadInput>,
) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
    let (input, lies) = (req.input, &service.lies);
    let bucket = service.bucket(&input.bucket)?;
    let if_none_match = input.if_none_match.as_ref().filter(|_| !lies.ignores_if_none_match);
    let condition = Condition::of(input.if_match.as_ref(), if_none_match)?;
    let condition = condition.unless(lies.ignores_conditions_on_complete);
    let named = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
    let claims = [
        (Algorithm::Crc32, input.checksum_crc32),
        (Algorithm::Crc32c, input.checksum_crc32c),
        (Algorithm::Crc64nvme, input.checksum_crc64nvme),
    ];
    // The bytes are counted already, as parts; now they become those of an object.
    let _alone = service.quota.alone();
    let (meta, checksum) = service.uploads.end((&input.bucket, &input.key, &input.upload_id), |upload| {
        let parts = chosen(upload, &named, service.limits.part_min)?;
        let body: Pieces = parts.iter().map(|part| part.body.clone()).collect();
        if input.mpu_object_size.is_some_and(|claimed| claimed.cast_unsigned() != body.size()) {
            return Err(s3_error!(InvalidRequest, "the parts are of another size than the object"));
        }
        for (algorithm, value) in claims.into_iter().filter(|_| !lies.no_checksums) {
            if let Some(value) = value.filter(|_| !upload.composite) {
                matches(&Checksum { algorithm, value }, &body)?;
            }
        }
        let checksum = upload.checksum(&parts, &body);
        let about = About { checksum: checksum.clone(), ..upload.about.clone() };
        let draft = Draft { body, about, parts: Some(parts.len()), modified: service.guard.now() };
        let meta = bucket.put_if(&input.key, draft, &condition).map_err(failed)??;
        Ok((meta, checksum))
    })?;
    let [checksum_crc32, checksum_crc32c, checksum_crc64nvme] = Checksum::fields(checksum.as_ref());
    let output = CompleteMultipartUploadOutput {
        location: Some(format!("/{}/{}", input.bucket, input.key)),
        e_tag: etag(&meta),
        checksum_crc32,
        checksum_crc32c,
        checksum_crc64nvme,
        checksum_type: checksum.map(|_| ChecksumType::from_static(ChecksumType::FULL_OBJECT)),
        bucket: Some(input.bucket),
        key: Some(input.key),
        ..CompleteMultipartUploadOutput::default()
    };
    Ok(S3Response::new(output))
}

pub(super) fn abort(service: &Service, input: &AbortMultipartUploadInput) -> S3Result<()> {
    let _alone = service.quota.alone();
    service.uploads.end((&input.bucket, &input.key, &input.upload_id), |_| Ok(()))
}

pub(super) fn list(
    service: &Service,
    input: ListMultipartUploadsInput,
) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
    service.bucket(&input.bucket)?;
    if input.delimiter.as_ref().is_some_and(|delimiter| !delimiter.is_empty()) {
        return Err(s3_error!(NotImplemented, "the testkit lists uploads without a delimiter"));
    }
    let url = input.encoding_type.as_ref().is_some_and(|kind| kind.as_str() == EncodingType::URL);
    let max = page(input.max_uploads).min(service.guard.page_max);
    let after = input.key_marker.as_deref().filter(|marker| !marker.is_empty());
    let id = input.upload_id_marker.as_deref().filter(|id| !id.is_empty());
    let prefix = input.prefix.unwrap_or_default();
    let page = service.uploads.list(&input.bucket, &prefix, after.map(|key| (key, id)), max);
    let last = page.uploads.last().filter(|_| page.is_truncated).cloned();
    let uploads = page.uploads.iter().map(|(key, id, initiated)| MultipartUpload {
        key: Some(encode(key, url)),
        upload_id: Some(id.clone()),
        initiated: Some((*initiated).into()),
        ..MultipartUpload::default()
    });
    let output = ListMultipartUploadsOutput {
        bucket: Some(input.bucket),
        uploads: Some(uploads.collect()),
        is_truncated: Some(page.is_truncated),
        max_uploads: Some(max as i32),
        next_key_marker: last.as_ref().map(|(key, ..)| encode(key, url)),
        next_upload_id_marker: last.map(|(_, id, _)| id),
        key_marker: input.key_marker.map(|key| encode(&key, url)),
        upload_id_marker: input.upload_id_marker,
        prefix: Some(encode(&prefix, url)),
        encoding_type: input.encoding_type,
        ..ListMultipartUploadsOutput::default()
    };
    Ok(S3Response::new(output))
}

pub(super) fn list_parts(service: &Service, input: ListPartsInput) -> S3Result<S3Response<ListPartsOutput>> {
    let max = page(input.max_parts).min(service.guard.page_max);
    let after = input.part_number_marker.unwrap_or(0);
    let name = (&*input.bucket, &*input.key, &*input.upload_id);
    let (parts, is_truncated) = service.uploads.with(name, |upload| {
        let mut rest = upload.parts.iter().filter(|(number, _)| **number > after);
        let parts: Vec<Part> = rest.by_ref().take(max).map(|(number, part)| of_held(*number, part)).collect();
        Ok((parts, rest.next().is_some()))
    })?;
    let output = ListPartsOutput {
        next_part_number_marker: parts.last().filter(|_| is_truncated).and_then(|part| part.part_number),
        parts: Some(parts),
        is_truncated: Some(is_truncated),
        max_parts: Some(max as i32),
        part_number_marker: input.part_number_marker,
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(input.upload_id),
        ..ListPartsOutput::default()
    };
    Ok(S3Response::new(output))
}

fn of_held(number: i32, part: &Held) -> Part {
    let [checksum_crc32, checksum_crc32c, checksum_crc64nvme] = Checksum::fields(part.checksum.as_ref());
    Part {
        part_number: Some(number),
        size: Some(part.body.len() as i64),
        e_tag: Some(ETag::Strong(part.etag.clone())),
        last_modified: Some(part.modified.into()),
        checksum_crc32,
        checksum_crc32c,
        checksum_crc64nvme,
        ..Part::default()
    }
}

fn page(wanted: Option<i32>) -> usize {
    usize::try_from(wanted.unwrap_or(1000)).unwrap_or(0).clamp(1, PAGE_MAX)
}
